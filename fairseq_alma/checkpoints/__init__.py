"""Read and write checkpoints, and join them into ensembles. No fairseq imports."""

# File name of the latest checkpoint of fairseq-train, from which fairseq-train resumes by default.
LAST_CHECKPOINT = "checkpoint_last.pt"
# Architecture with several member models, which are trained jointly on the mean or sum of their logits.
JOINT_MODEL = "alma_umix"
# Keys of ``extra_state`` for the state of training features: the class names of the tasks for text and images.
TASK_STATE, IMAGE_TASK_STATE = "AlmaLMTask", "AlmaImageClassificationTask"
# Keys of the state of training features: ``train_tokens``, number of training tokens of the stage, summed over epochs;
# ``first_update``, number of updates before the stage (with ``--carry-optimizer``); ``average``, averaged fp32
# weights by parameter name.
TRAIN_TOKENS, FIRST_UPDATE, AVERAGE = "train_tokens", "first_update", "average"
