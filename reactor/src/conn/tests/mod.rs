//! Tests of connections as a whole.

mod histories;
