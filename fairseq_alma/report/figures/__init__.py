"""The paper's figures over any set of runs, a module for each. Importing this package does not import matplotlib."""

from fairseq_alma.report.figures.figure_files import FigureFile, draw_all

__all__ = ["FigureFile", "draw_all"]
