"""Mixtures of experts: gate, dispatch, experts, layers."""
