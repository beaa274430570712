"""The program behind ``alma-prep-images``: published image files to a stream.

Read in this order: ``command`` and ``options``, ``prepare`` (the whole course, and which data set is read how),
then the formats: ``idx``, ``cifar`` with ``array_pickle``, ``table`` and ``arrays``. ``input_files`` finds and
records what they read; ``image_set`` is what they give.
"""
