//! Compares the cost of the same work by bare TCP and by `rdma-pingpong`, in one run.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    rdma_reactor_tools::bench::main(std::env::args_os())
}
