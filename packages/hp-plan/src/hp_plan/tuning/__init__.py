"""Choosing a plan: every plan of a space priced by traces of a few, on machines that a table describes.

Frozen values and arrays; no rank is started, and what plays a plan is passed in.
"""
