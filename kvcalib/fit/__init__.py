"""Learn the numbers of a format: thresholds, frames, levels. Pure functions, no model, no files.

thresholds  exact percentiles per channel from streamed tails
frame       the static interval (zero, scale) of every channel
sensitivity the weight of every element: squared gradient times squared range
histogram   millions of weighted points -> a few thousand
kmeans      weighted 1-D k-means (scikit-learn) and its exact optimum
grids       levels that need no fit: uniform, NormalFloat, fp8
levels      rounding of fitted levels to bfloat16
"""
