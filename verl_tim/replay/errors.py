"""The one error of this package."""


class ReplayError(ValueError):
    """Routes that cannot be replayed, or a router that they cannot be given to; names sample, layer and position."""
