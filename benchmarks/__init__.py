"""What training costs here, beside what it costs without this package: python -m benchmarks

Each module measures one thing and can be read alone; docs/performance.md says how, and has the
numbers. Both sides of a comparison run in turn in the same run. Linux only.
"""
