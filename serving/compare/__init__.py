"""Budgets and other settings side by side under the same load, with how sure the figures are."""
