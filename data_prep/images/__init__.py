"""The program behind ``alma-prep-images``: published image files to a stream, ``command`` with ``formats``."""
