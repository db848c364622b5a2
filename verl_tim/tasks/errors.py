"""The one error of this package: something the user gave cannot be used, and here is what to do."""


class InputError(ValueError):
    """A setting, file or folder that cannot be used. The message names the key to change and the remedy."""
