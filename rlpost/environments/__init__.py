"""What a policy acts in, behind one protocol; a single turn first."""
