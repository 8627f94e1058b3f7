"""What commands print and write of a run: `report` as text, `html_report` with its figures.

`measures` has the figures of both: tokens per second, MFU and HFU.
"""
