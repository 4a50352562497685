"""What explains the mathematics and quantizes no model: two weights in the plane, their pictures, LLL reduction."""
