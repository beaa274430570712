"""One page with everything: ``index.html``, which opens without a network."""

from fairseq_alma.report.page.build import build_page

__all__ = ["build_page"]
