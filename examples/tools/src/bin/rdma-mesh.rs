//! Finds the links of a cluster that are slow or do not work: one process per host measures every pair.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    rdma_reactor_tools::mesh::main(std::env::args_os())
}
