"""Recipes and launch settings: YAML and JSON files only, shipped as package data."""
