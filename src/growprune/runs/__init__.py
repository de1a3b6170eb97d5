"""Run folders, read: one reader, and one definition of which runs are comparable, for compare, report, cli and plots."""
