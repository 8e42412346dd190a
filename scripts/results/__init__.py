"""The parts of scripts/write_results.py: reports read, targets judged, tables and pictures made."""
