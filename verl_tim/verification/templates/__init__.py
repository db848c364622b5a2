"""The Jinja template of the reports; a package, so that it is installed with the wheel."""
