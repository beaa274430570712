"""Make reports of runs: tables, figures and an HTML page. Imports neither torch nor fairseq."""
