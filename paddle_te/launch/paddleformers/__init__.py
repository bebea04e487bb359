"""Start a job of the launcher with PaddleFormers as the host.

The same arguments become a recipe of it, and a folder of what the model starts from. What has no counterpart there is
refused, naming PaddleFormers.

- `recipe`: flags in PaddleNLP's names, which all jobs make, in PaddleFormers' words;
- `start`: configuration, tokenizer and weights, which the launcher takes from three places, as the one folder that
  PaddleFormers reads.

Neither imports Paddle; `start` imports NumPy, and is imported only where it is needed.
"""
