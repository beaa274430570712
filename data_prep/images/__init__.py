"""Implementation of ``alma-prep-images``, which converts image files to a stream.

Modules: ``command`` (options and main program), ``formats`` (readers of file formats).
"""
