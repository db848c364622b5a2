"""Tasks: data sets, rewards, tokenizer and small base models; all made here from a seed, but for published data.

| file | noun |
|---|---|
| catalog.py | the tasks: reasoning-gym's sets and their difficulty |
| problems.py | streams of problems in two pools that never share one |
| verifier.py | where an answer stands in a response, and the verifier's score of it |
| reward.py | `compute_score`, verl's reward function |
| dataset.py | `build_dataset`: parquet in verl's schema |
| published/ | data sets of the Hugging Face hub and of the user's own files |
| math/ | the reward of mathematics with free-form answers |
| task_data.py | `task_files`: the files of a task, made here or published |
| tokenizer.py | the small models' tokenizer |
| architectures.py | the small models' shapes: Qwen3, Qwen3-MoE |
| worked.py | worked solutions, what the supervised phase shows |
| warmup.py | the supervised phase |
| sampling.py, measure.py | what a small model scores, and what its distributions look like |
| all_experts.py | the experts of a small mixture as a few large products, for the warm-up on a GPU |
| base_model.py | `build_base_model`: tokenizer, shape and supervised phase in a Hugging Face folder |
| artifact.py | folders made once, found by content key, published atomically |
| file_set.py | files of a folder that belong together, exchanged as one |
| parts.py | a made model as parts of a limited size, and back into a cache |
| checks.py | `check_dataset`: a data file against what verl reads of a row |
| errors.py | `InputError` |

Nothing is imported here, so that the reward function loads without torch.
"""
