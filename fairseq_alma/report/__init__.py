"""Reports over runs: tables, figures and one page, from the records of runs. Imports neither torch nor fairseq."""
