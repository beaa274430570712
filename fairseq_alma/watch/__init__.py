"""What a user watches: the live line, forecasts, curves over arrivals."""
