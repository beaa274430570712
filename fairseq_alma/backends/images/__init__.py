"""Algorithm 1 on streams of images: training, growth and tests in one process, for ``alma-stream``."""
