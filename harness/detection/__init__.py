"""What a criterion sees: faults of every size put into right outputs, and four criteria held against each other."""
