"""Compute memory and time of a model's layouts on some GPUs, and find the best ones. No Paddle.

| | |
|---|---|
| `model` | the sizes of a model, from its config.json |
| `layout` | a Job by its layout, and the launcher's arguments that make it |
| `gpus` | what a GPU has and reaches |
| `memory` | the greatest memory of a step, by part |
| `speed` | the time of a step, by part |
| `formulas` | both in words, with their sources |
| `plan` | a layout with its memory and time |
| `measured` | which layouts ran on GPUs, and how fast |
| `ranking` | which of two layouts is the better one |
| `search` | all layouts of so many GPUs: which fit, in the order of their speed, and why the others do not |
| `remedies` | what fits where a job does not |
| `command` | `paddle-te plan` |

All numbers of hardware stand in `gpus`; `memory` and `speed` have the formulas, with their sources.
"""
