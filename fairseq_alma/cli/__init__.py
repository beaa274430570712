"""The ``alma-*`` commands, and functions for notebooks."""
