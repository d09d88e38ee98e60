"""The step of parameters whose elements lie in several processes: a step of plain ones passes it by."""
