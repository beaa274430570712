"""Measurements on trained models that fairseq has no command for."""
