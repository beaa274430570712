"""What trains and tests: ``text`` by fairseq's own commands in processes, ``images`` in this process."""
