//! Which links of a cluster are slow, and which do not work: one process per host, every pair measured.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    rdma_reactor_tools::mesh::main(std::env::args_os())
}
