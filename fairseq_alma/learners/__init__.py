"""What a learner decides: the schedule of stages, and the plan of each stage. No fairseq."""
