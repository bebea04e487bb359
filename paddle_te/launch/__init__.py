"""The launcher behind llm/llama/scripts/*.sh: `python -m paddle_te.launch JOB ...` checks, builds one command, runs it.

A job is a module here: `pretrain` or `finetune`. Each has

- ARGUMENTS: its options (`paddle_te.options.launcher`), in the order of its script's positional arguments;
- VARIABLES: those of its own that are read from the environment, beside those of all jobs;
- FIXED: {name: value} of what other jobs choose and this one does not;
- OUTPUT_NAME: what chooses its output folder, for messages;
- model_config(args): the model's config.json;
- folders(args, nodes, dp): where it keeps its logs, and what its script writes;
- flags(args, device, world, output): its script's flags, in PaddleNLP's names.

A wrong argument or an impossible combination is one line that names it and what it may be, exit status 2, before
anything starts or is written. Imports neither paddle nor paddlenlp, which take seconds.
"""
