"""verl_tim: zero training-inference mismatch for verl.

Importing this package changes nothing; importing `verl_tim.plugin` registers with verl.
"""

__version__ = "0.1.0"
