"""Reports over runs: what a run's files say, tables, findings, figures, one page. Needs neither torch nor fairseq."""
