"""Measuring: synthetic models of full shape, rates of the machine, and reports that stand beside their bounds.

Owns what `makeway bench` runs. Never decides how the engine works: it is used by nothing but the command line.
Hazard: a number without its bound, machine and command is worth nothing; `report` prints all of them or refuses.
"""
