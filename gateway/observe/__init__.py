"""What is measured of requests: timelines, metrics, spans and the history of the last minutes."""
