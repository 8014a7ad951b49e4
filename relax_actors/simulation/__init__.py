"""Engines that take the time of real ones on devices that one does not have; they import no torch."""
