"""The program behind ``alma-prep-images``: published image files to a stream.

Read in this order: ``command`` (the whole course, and which data set is read how), ``image_set`` (what is read, and
what comes of it), then ``formats``.
"""
