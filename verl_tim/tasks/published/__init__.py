"""Published data sets in verl's parquet schema, from the Hugging Face hub or from files of the user's own.

| file | noun |
|---|---|
| sources.py | the table: repository, pinned revision and checksums, columns, licence, and what of it is inferred |
| hub.py | one file of a repository, with the commit it came from |
| download.py | a download that goes on where it stopped |
| local.py | one file of the user's own, with the column mapping |
| rows.py | the rows of a parquet, jsonl or csv file |
| problem.py | a row's problem and its true answer |
| prompt.py | how a problem is put to the model |
| distinct.py | problems without their copies |
| build.py | `build_published`: the parquet files, with a manifest |
"""
