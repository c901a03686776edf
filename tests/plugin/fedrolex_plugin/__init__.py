"""A package that brings a method, a scheme, an engine, a model, a data set, a metric and a callback."""
