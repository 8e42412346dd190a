"""Drafters, trees, verification and generation, and what works on lists of prompts: suites, bench, reports."""
