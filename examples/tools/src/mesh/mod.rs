//! `rdma-mesh` finds the links of a cluster that are slow or do not work.
//!
//! A process gets its rank from its launcher ([`launcher`]), finds rank 0 ([`follower`]), connects to all other ranks ([`storm`]), and
//! measures when rank 0 orders it ([`member`], [`task`], [`load`]). Rank 0 controls the run ([`leader`], [`coordinator`], [`tournament`])
//! and collects the results ([`results`]). Rank 0 finds the ranks and the links that are worse than others ([`odd`]), and reports
//! ([`report`], [`figures`], [`prometheus`], [`heatmap`], [`page`]).

pub mod cli;
pub mod control;
pub mod coordinator;
pub mod figures;
pub mod follower;
pub mod frame;
pub mod heatmap;
pub mod hello;
pub mod launcher;
pub mod leader;
pub mod link;
pub mod load;
pub mod member;
pub mod memory;
pub mod odd;
pub mod outbox;
pub mod page;
pub mod prometheus;
pub mod rank;
pub mod report;
pub mod results;
pub mod role;
pub mod run;
#[cfg(test)]
mod sample;
pub mod slurm;
pub mod storm;
pub mod task;
pub mod tournament;

use std::ffi::OsString;
use std::process::ExitCode;

use crate::program;

/// Runs the program: parses the command line and takes part in the run. Prints a failure in one line.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    program::main(args, run::run)
}
