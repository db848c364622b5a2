"""Jinja templates of the shell scripts; a package, so that a wheel has them."""
