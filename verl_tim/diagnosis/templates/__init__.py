"""The page's Jinja templates; a package, so that they are installed with the wheel."""
