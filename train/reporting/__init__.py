"""What a run shows: metrics, reports, comparisons, traces."""
