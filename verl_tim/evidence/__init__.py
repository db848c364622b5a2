"""docs/evidence.md and what stands behind it: run folders in, figures, tables and the page out.

| file | what it is |
| --- | --- |
| names.py | what a run's folder is called, and the settings that are compared |
| runs.py | the run folders of a matrix, by model and algorithm |
| archive.py | run folders as a few small archives, and back |
| used.py | the metrics that figures and tables read |
| effect.py | what a correction does to one run's tokens |
| tables.py | every table of the page |
| figures.py | every picture |
| parts.py | figures and tables by name |
| page.py | the page |
"""
