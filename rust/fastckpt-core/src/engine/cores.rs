//! The cores of a rank: the cores that it may run on, and its share of the cores of its node.

use std::fs::read_to_string;
use std::path::Path;

/// A rank gets this many cores if it may run on them, however small its share is: ranks rarely copy at the same time,
/// and one core copies and sums only a few GB/s.
const LEAST: usize = 4;
/// The unit of the numbers below: thousandths of a core, because a quota may have a fraction.
const CORE: u64 = 1000;

/// The cores of one of `ranks` processes on this node; `ranks` is 0 if unknown. The query costs 0.1 ms.
pub(super) fn of(ranks: usize) -> usize {
    let own = rustix::thread::sched_getaffinity(None).map_or(1, |set| set.count() as usize);
    share(Path::new("/"), own, ranks.max(1))
}

/// At most `own`, the cores that the process's affinity allows. An affinity may be the rank's own (`torchrun
/// --numa-binding`, `srun --cpus-per-task`), so it is not divided. All ranks share the online processors and the
/// control groups, so these are divided. A part of a core counts as one: a worker waits more than it computes.
fn share(root: &Path, own: usize, ranks: usize) -> usize {
    let groups = read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let online = count(root, "sys/devices/system/cpu/online").unwrap_or(own as u64 * CORE);
    let all = groups.lines().filter_map(|line| together(&root.join("sys/fs/cgroup"), line));
    let cores = all.fold(online, u64::min).div_ceil(CORE) as usize;
    own.min(cores).min((cores / ranks).max(LEAST)).max(1)
}

/// What the control groups of a line of `/proc/self/cgroup` allow, from the process's group to the root (cgroups(7)).
fn together(base: &Path, line: &str) -> Option<u64> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (controllers, name) = (fields.next()?, fields.next()?);
    // Version 2 has no controllers here. In a container the name may not exist, but the root is the container's group.
    let tops = controllers.split(',').filter(|controller| matches!(*controller, "" | "cpu" | "cpuset"));
    let limits = tops.flat_map(|top| {
        let groups = Path::new(name.trim_start_matches('/')).ancestors();
        groups.filter_map(move |group| {
            let group = &base.join(top).join(group);
            let version_2 =
                |text: String| text.split_once(' ').and_then(|(quota, period)| ratio(quota, period));
            let text = |file: &str| read_to_string(group.join(file)).ok();
            let version_1 = || ratio(&text("cpu.cfs_quota_us")?, &text("cpu.cfs_period_us")?);
            let quota = text("cpu.max").and_then(version_2).or_else(version_1);
            let set =
                ["cpuset.cpus.effective", "cpuset.effective_cpus"].iter().find_map(|file| count(group, file));
            [quota, set].into_iter().flatten().reduce(u64::min)
        })
    });
    limits.reduce(u64::min)
}

/// A quota; `None` if there is no quota (`max`, -1).
fn ratio(quota: &str, period: &str) -> Option<u64> {
    let [quota, period] = [quota, period].map(|text| text.trim().parse::<u64>().ok());
    quota?.checked_mul(CORE)?.checked_div(period?)
}

/// The number of processors in a list such as `0-3,8`, in thousandths of a core.
fn count(directory: &Path, file: &str) -> Option<u64> {
    let text = read_to_string(directory.join(file)).ok()?;
    let range = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let [first, last] = [first, last].map(|text| text.parse::<u64>().ok());
        Some((last?.checked_sub(first?)? + 1) * CORE)
    };
    text.trim().split(',').map(range).sum()
}

#[cfg(test)]
mod tests {
    use std::fs::{create_dir_all, write};

    use super::*;

    /// The cores of one of `ranks` ranks that may run on `own` cores, on a machine with these files.
    fn cores(files: &[(&str, &str)], own: usize, ranks: usize) -> usize {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let file = root.path().join(name);
            create_dir_all(file.parent().unwrap()).unwrap();
            write(file, text).unwrap();
        }
        share(root.path(), own, ranks)
    }

    #[test]
    fn an_affinity_of_its_own_is_not_divided_and_what_the_node_has_is() {
        let online = ("sys/devices/system/cpu/online", "0-55,64-119\n");
        assert_eq!(cores(&[online], 14, 8), 14, "the rank is bound to these cores");
        assert_eq!(cores(&[online], 112, 8), 14, "the rank is not bound");
        assert_eq!(cores(&[online], 7, 8), 7);
        assert_eq!(cores(&[], 112, 8), 14, "the online processors are unknown");
        assert_eq!(cores(&[("sys/devices/system/cpu/online", "0-13")], 14, 8), LEAST);
        assert_eq!(
            cores(&[("sys/devices/system/cpu/online", "0,1")], 2, 8),
            2,
            "a rank never gets more cores than it may run on"
        );
    }

    #[test]
    fn quotas_and_sets_of_control_groups_are_shared() {
        let online = ("sys/devices/system/cpu/online", "0-255");
        let two = ("proc/self/cgroup", "0::/job/step\n");
        let one = ("proc/self/cgroup", "7:pids:/\n3:cpuset:/a\n1:cpu,cpuacct:/docker/x\n0::/\n");
        for (files, wanted) in [
            ([two, ("sys/fs/cgroup/job/cpu.max", "5600000 100000\n")], 7),
            ([two, ("sys/fs/cgroup/job/cpu.max", "max 100000\n")], 14),
            ([two, ("sys/fs/cgroup/job/step/cpuset.cpus.effective", "0-39,50\n")], 5),
            ([two, ("sys/fs/cgroup/cpuset.cpus.effective", "\n")], 14),
            ([one, ("sys/fs/cgroup/cpuset/a/cpuset.effective_cpus", "0-47\n")], 6),
            ([one, ("sys/fs/cgroup/pids/cpu.max", "100 100000\n")], 14),
        ] {
            assert_eq!(cores(&[&files[..], &[online]].concat(), 14, 8), wanted, "{files:?}");
        }
        let quota = ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "4000000\n");
        let period = ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
        assert_eq!(cores(&[online, one, quota, period], 14, 8), 5, "the container's group is the root");
        let none = ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
        assert_eq!(cores(&[online, one, none, period], 14, 8), 14);
    }

    #[test]
    fn a_quota_binds_each_rank_and_its_fraction_is_a_core() {
        let two = ("proc/self/cgroup", "0::/\n");
        for (quota, wanted) in
            [("150000 100000\n", 2), ("200000 100000\n", 2), ("20000 100000\n", 1), ("0 1\n", 1)]
        {
            for ranks in [1, 8] {
                assert_eq!(
                    cores(&[two, ("sys/fs/cgroup/cpu.max", quota)], 64, ranks),
                    wanted,
                    "{quota} {ranks}"
                );
            }
        }
        assert_eq!(cores(&[two, ("sys/fs/cgroup/cpu.max", "6400000 100000\n")], 64, 1), 64);
    }
}
