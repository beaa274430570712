"""Reports: tables, figures and one page from the records of runs. No torch, no fairseq."""
