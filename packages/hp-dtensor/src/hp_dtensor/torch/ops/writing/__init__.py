"""Writes into DTensors: assignments, fills and `out=`."""
