"""The reward of mathematics with free-form answers: math-verify, in worker processes that a hostile answer cannot take
down the run with.

| file | noun |
|---|---|
| answer.py | where an answer stands in a response: the last `\\boxed{}`, `#### x`, `Answer: x` |
| plain.py | an answer's plain form: what can be compared as text or as an integer, and what is handed to math-verify |
| judge.py | math-verify's verdict on a ground truth and an answer; runs in a worker |
| worker.py | the worker process: limits on time and memory, one verdict per line |
| pool.py | the workers of one process: started when needed, killed when late, replaced when dead |
| reward.py | `compute_score`, verl's reward function |

Nothing is imported here: a worker starts without torch and without verl.
"""
