"""Algorithm 1 of the paper, once, and the learners as strategies over it. No fairseq.

- ``schedule``: which mega-batches each stage trains on
- ``plan``, ``strategy``: what a learner does in a stage, as data
- ``loop``: carries the plans out, over any back end
- ``run_folder``: RUN/, its records, its locks; ``run_record``, ``stage_clock``, ``json_files``
- ``run_display``: what a user sees of a run; ``progress`` (one training), ``forecast`` (the time left)
- ``text_backend``: language models, through the stock commands in processes of their own;
  ``text_commands``, ``train_options`` (their command lines), ``process`` (running them), ``fairseq_log`` (what they say
  meanwhile), ``checkpoints`` (their files)
"""
